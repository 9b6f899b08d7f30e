"""The products that programs call, with their gradients."""

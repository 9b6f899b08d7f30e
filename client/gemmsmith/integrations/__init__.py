"""What other libraries are told of gemmsmith. Each module imports its library when it is called."""

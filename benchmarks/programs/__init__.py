"""Programs of users, which do not import gemmsmith."""

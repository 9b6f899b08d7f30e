"""The HTTP interface: the application, its routes, what comes in and goes out, and who may ask."""

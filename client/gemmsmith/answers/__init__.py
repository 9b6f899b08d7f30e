"""What a service answers, and how it is held to choose from without one."""

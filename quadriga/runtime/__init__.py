"""What each process of the server uses to run as a child of the launcher."""

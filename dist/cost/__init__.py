"""What an exchange would take: its messages, the algorithms behind MPI's collectives, and seconds from port rates."""

"""What a machine is and what its network does: cores, ports, links, the launcher."""

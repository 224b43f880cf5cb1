"""Blue-green releases on a Docker host, and the probes that gate them."""

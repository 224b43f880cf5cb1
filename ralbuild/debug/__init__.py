"""Rules and user kernels stepped through on the CPU, and the rules tried before a server that exists."""

"""Rules and a vocabulary become automata. Pure: no disk, no clock, no environment, no network."""

"""PTX text to a checked value: lexer, parser, and what a module is made of."""

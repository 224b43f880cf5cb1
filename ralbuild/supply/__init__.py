"""What an image says of itself to others: bill of materials, provenance, signature, and checking them."""

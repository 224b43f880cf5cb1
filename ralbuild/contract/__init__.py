"""What crosses from the builder into the image. Standard library only; imports nothing else of ours."""

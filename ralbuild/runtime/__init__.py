"""What runs inside the image: checks, weights, decode loop, HTTP. Imports only `ralbuild.contract`."""

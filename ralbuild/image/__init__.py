"""The image writer: from an inert plan to an OCI layout or archive, without docker and without root."""

"""A client of the OCI distribution API: push, pull, mount and referrers. docs/registry.md is its manual."""

"""A build, stage by stage: `building.build_image` reads from top to bottom."""

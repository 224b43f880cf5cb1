"""Where a release's image comes from: a name is what it means now, whatever it means tomorrow."""

from __future__ import annotations

from pathlib import Path

import pytest
from release_support import ProcessHost

from ralbuild.errors import ImageError
from ralbuild.release.source import fetch, parse_source


class NamingHost(ProcessHost):
    """An engine that also knows images by name."""

    def __init__(self, folder: Path, names: dict[str, str]) -> None:
        super().__init__(folder)
        self.names = names

    def identify(self, image: str) -> str:
        return super().identify(self.names.get(image, image))


def test_a_name_of_the_engine_becomes_the_id_that_it_has_now(tmp_path: Path) -> None:
    host = NamingHost(tmp_path / "host", {})
    one, two = host.add_image("a"), host.add_image("b")
    host.names["team/m:1"] = one.image
    found = fetch(parse_source("docker:team/m:1", ""), host)
    host.names["team/m:1"] = two.image
    assert found == one
    assert fetch(parse_source("docker:team/m:1", ""), host) == two
    with pytest.raises(ImageError, match="no such image"):
        fetch(parse_source("docker:team/m:2", ""), host)

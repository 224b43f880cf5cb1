"""`--help` of every verb, and of every verb of a verb: its own options, and what each is when left out."""

from __future__ import annotations

import argparse
import importlib
import re

import pytest

from ralbuild.cli.main import VERBS, main


def parsers(verb: str) -> dict[tuple[str, ...], argparse.ArgumentParser]:
    """Return a verb's parser and those of its verbs, as its module declares them to the standard library."""
    top = argparse.ArgumentParser()
    importlib.import_module(f"ralbuild.cli.{verb.replace('-', '_')}_cmd").add_arguments(top)
    found = {(verb,): top}
    for action in top._actions:
        if isinstance(action, argparse._SubParsersAction):
            found |= {(verb, name): child for name, child in action.choices.items()}
    return found


def help_of(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as ended:
        main([*words, "--help"])
    assert ended.value.code == 0
    return re.sub(r"\s+", " ", capsys.readouterr().out)


@pytest.mark.parametrize("verb", VERBS)
def test_every_option_is_explained_with_its_default(
    verb: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "1000")  # no text is broken at its hyphens
    for words, parser in parsers(verb).items():
        text = help_of(words, capsys)
        for action in parser._actions:
            name = (action.option_strings or [action.dest])[0]
            if isinstance(action, argparse._SubParsersAction):
                continue
            assert action.help, (words, name)
            default = action.default
            if default in (None, False, "", []) or default == argparse.SUPPRESS:
                continue
            part = text[text.index(re.sub(r"\s+", " ", action.help).split("%")[0]) :]
            assert re.match(r".*?default: \S", part), (words, name)


def test_each_verb_of_base_has_its_own_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert {"build", "render", "lock"} <= set(re.findall(r"\w+", help_of(("base",), capsys)))
    options = {name: set(re.findall(r"--[a-z-]+", help_of(("base", name), capsys))) for name in
               ("build", "render", "lock")}  # fmt: skip
    shared = {"--help", "--target", "--lock", "--quiet", "--progress"}
    registries = {
        "--registry-profile",
        "--insecure-registry",
        "--registry-ca",
        "--chunk-size",
        "--push-jobs",
    }
    assert options["build"] == shared | registries | {"--out", "--tag", "--refresh"} | {"--output"}
    assert options["render"] == shared | {"--out", "--from"}
    assert options["lock"] == shared | {"--dry-run"}


@pytest.mark.parametrize("words", [["--out", "nowhere:x"], ["build", "--out", "nowhere:x"]])
def test_build_is_meant_where_base_is_told_no_verb(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["base", *words]) == 2
    assert "'nowhere:x'" in capsys.readouterr().err

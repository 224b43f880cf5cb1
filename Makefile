# Two commands do all the set-up: `make demo` builds and asks a real image, `make test` passes the tests.
# Both keep their environment in .venv/.
.PHONY: demo test check format clean

demo:
	ci/setup convert
	.venv/bin/python ci/demo.py

test:
	ci/setup dev
	ci/check
	ci/test

check:
	ci/setup dev
	ci/check

format:
	.venv/bin/ruff check --fix .
	.venv/bin/ruff format .

clean:
	rm -rf .venv build .pytest_cache .mypy_cache .ruff_cache

#!/bin/sh
# Static: nothing is rendered into this file, so its digest never changes with a config.
# exec keeps the server at process 1, where it receives SIGTERM and drains its streams.
set -eu
exec /usr/bin/python3.11 -m ralbuild.runtime "$@"

"""Settings of all tests. Laws are tried on the same cases each time; `--hypothesis-profile=default` takes new ones."""

from hypothesis import settings

settings.register_profile("ci", derandomize=True, deadline=None, database=None, max_examples=60)
settings.load_profile("ci")

"""The tests, by purpose; `tests.bed` runs those that need several ranks."""

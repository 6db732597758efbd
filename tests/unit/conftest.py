"""Property tests draw the same examples in every run, so that what fails once fails again."""

from hypothesis import settings

settings.register_profile("seeded", derandomize=True, deadline=None)
settings.load_profile("seeded")

"""Questions, graders, and how chat models speak."""

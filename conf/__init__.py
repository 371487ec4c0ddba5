"""The Hydra vocabulary: groups that recipes are written with."""

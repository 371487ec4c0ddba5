"""Knowledge distillation as a PyTorch Lightning callback."""

__version__ = "0.1.0"

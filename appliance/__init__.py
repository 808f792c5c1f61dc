"""FlashRL appliance: reinforcement learning of language models with quantised rollouts, from one recipe file."""

__version__ = "0.1.0"

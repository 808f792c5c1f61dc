"""Rewards of our own: a function of the response, the truth and the whole row, 0 to 1 or any other finite number."""


def right_sum(response: str, truth: str, *, row: dict) -> float:
    """1 for the sum."""
    return float(response.strip() == truth)


def only_digits(response: str, truth: str, *, row: dict) -> float:
    """A penalty: -1 for anything but digits."""
    return 0.0 if response.strip().isdigit() else -1.0

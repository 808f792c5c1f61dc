"""Rewards of our own: a function of the response, the truth and the whole row, 0 to 1 or any other number."""


def right_sum(response: str, truth: str, *, row: dict) -> float:
    return float(response.strip() == truth)


def digits_only(response: str, truth: str, *, row: dict) -> float:
    return float(response.strip().isdigit())

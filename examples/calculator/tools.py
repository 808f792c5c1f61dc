"""Tools of our own: what the model may call. It reads their type hints and docstrings."""


def multiply(a: int, b: int) -> int:
    """
    Multiplies two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a * b

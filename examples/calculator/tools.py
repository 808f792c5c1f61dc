"""Tools of our own: what the model may call. Type hints and docstring are what it is told of them."""


def multiply(a: int, b: int) -> int:
    """
    Multiplies two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a * b

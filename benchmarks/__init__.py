"""What makes the README's numbers, `appliance accept`, and the profile that the stress comparisons begin with."""

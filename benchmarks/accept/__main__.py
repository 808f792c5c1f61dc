"""`python -m benchmarks.accept`: `appliance accept`, for a host that has the code and not the program."""

from appliance.cli import main

if __name__ == "__main__":
    import sys

    sys.argv.insert(1, "accept")
    main()

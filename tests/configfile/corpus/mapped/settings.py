"""Settings of a small trainer."""

batch = 48
accumulate = 1
mixed = "no"

if __name__ == "__main__":
    print(batch * accumulate)

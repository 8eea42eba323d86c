import argparse

parser = argparse.ArgumentParser(description="Train 😀")
parser.add_argument("--batch-size", type=int, default=32, help="per step 😀")
parser.add_argument("--grad-accum", type=int, default=1)
parser.add_argument("--lr", default=1e-3)

"""Print the mean of numbers."""

import sys

numbers = [float(text) for text in sys.argv[1:]]
print(sum(numbers) / 2)

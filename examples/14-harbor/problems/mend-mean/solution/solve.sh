sed -i 's|/ 2|/ len(numbers)|' mean.py

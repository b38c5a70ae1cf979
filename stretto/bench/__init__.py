"""Speed, measured beside other engines in the same process: same weights, same dtype, same threads, in turns."""

"""Device times of the operations, measured against ceilings of the same run or modelled for AMD targets."""

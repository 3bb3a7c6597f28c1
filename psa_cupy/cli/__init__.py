"""The commands of python -m psa_cupy, one file each."""

"""Replaying traces against policies and pool sizes, as ``kvfs simulate`` does. Needs no mount."""

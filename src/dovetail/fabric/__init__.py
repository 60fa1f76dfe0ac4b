"""The fabric: policy-compliant routing computed in the data plane, after D2R."""

"""What-ifs on the same tokens: each variant yields something the scan can route."""

"""Parse the calls of one style each: what stands between the marks around them."""

"""Code that sources share: it finds, opens and decodes files, and caches facts about them."""

"""What sources share: they find, open and decode files, and keep what they learned of them."""

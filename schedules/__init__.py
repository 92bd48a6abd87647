"""What runs when: domain policies, block configs, work order, role programs, and the machine that proves them."""

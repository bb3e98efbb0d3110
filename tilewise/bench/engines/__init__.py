"""The engines that `tilewise bench engine` measures, each in a process of its own."""

"""Stand-in for mori.cpp, where the real one opens libmori_application.so for the whole process."""

from rocm_standin import arrive

arrive(__name__)

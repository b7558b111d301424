// The images for the releases that a cluster runs: `docker buildx bake -f docker/docker-bake.hcl` from the repository's
// top, after `make build`. One more release is one more name in RELEASES.

variable "RELEASES" {
  default = ["v0.20.2", "v0.21.0", "v0.22.1", "v0.23.0", "v0.24.0", "v0.25.1", "v0.26.0", "v0.27.1", "v0.28.0", "v0.29.0", "v0.30.0", "v0.31.0", "v0.32.0", "v0.33.0"]
}

variable "BASE" {
  default = "vllm/vllm-openai-rocm"
}

variable "NAME" {
  default = "vllm-openai-rocm-fixes"
}

variable "VERSION" {
  default = "unknown"
}

variable "REVISION" {
  default = "unknown"
}

group "default" {
  targets = ["image"]
}

target "image" {
  name       = "${way}-${replace(release, ".", "-")}"
  matrix     = { release = RELEASES, way = ["plugin", "baked"] }
  context    = "."
  dockerfile = "docker/Dockerfile"
  target     = way
  platforms  = ["linux/amd64"]
  args = {
    BASE_IMAGE = "${BASE}:${release}"
    VERSION    = VERSION
    REVISION   = REVISION
  }
  tags = ["${NAME}:${release}${way == "baked" ? "-baked" : ""}"]
}

# A machine image (AMI) for cluster.yaml on which dray's packages are installed: machines then start in a minute or two, not
# ten. From the root of this repository, with AWS credentials:
#
#   packer init clusters/ami.pkr.hcl
#   packer build clusters/ami.pkr.hcl     # about 15 minutes, for some cents; prints the image's id
#
# Set ImageId to that id for the head and the workers. When constraints.txt changes, `ray up` still installs the difference,
# and a new image saves that again.

packer {
  required_plugins {
    amazon = {
      source  = "github.com/hashicorp/amazon"
      version = "~> 1.3"
    }
  }
}

variable "region" {
  type    = string
  default = "us-west-2"
}

# The image that cluster.yaml uses: it has NVIDIA's driver and EFA.
data "amazon-parameterstore" "base" {
  region = var.region
  name   = "/aws/service/deeplearning/ami/x86_64/base-oss-nvidia-driver-gpu-ubuntu-24.04/latest/ami-id"
}

source "amazon-ebs" "dray" {
  region        = var.region
  source_ami    = data.amazon-parameterstore.base.value
  ami_name      = "dray-${formatdate("YYYYMMDD-hhmmss", timestamp())}"
  instance_type = "m6i.xlarge" # pip needs no GPU
  ssh_username  = "ubuntu"
  launch_block_device_mappings {
    device_name           = "/dev/sda1"
    volume_size           = 150
    volume_type           = "gp2"
    delete_on_termination = true
  }
}

build {
  sources = ["source.amazon-ebs.dray"]

  provisioner "shell" {
    inline = ["mkdir ~/dray", "cloud-init status --wait"] # which may hold apt's lock
  }
  # As in cluster.yaml, which brings newer ones.
  provisioner "file" {
    sources     = ["dray", "searchers", "pyproject.toml", "constraints.txt", "README.md", "LICENSE"]
    destination = "/home/ubuntu/dray/"
  }
  # As in cluster.yaml, which then finds that constraints.txt is the same, and installs nothing.
  provisioner "shell" {
    inline = [
      "sudo apt-get -qq update && sudo apt-get -qq install python3-venv",
      "python3 -m venv ~/dray-venv",
      "~/dray-venv/bin/pip install -q -c ~/dray/constraints.txt -e ~/dray boto3",
      "cp ~/dray/constraints.txt ~/dray-venv/",
    ]
  }
}

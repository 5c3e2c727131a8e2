#!/bin/bash
set -e
groupadd planners
for user in ada ben; do usermod -aG planners $user; done
cd /srv/plans
chgrp -R planners .
# as one of the group: without CAP_FSETID the kernel drops the set-group-id bit of others
sg planners -c 'find . -type d -exec chmod 3770 {} +'
find . -type f -exec chmod u+rw,g+rw,o= {} +
find . -type f -perm -u+x -exec chmod g+x {} +

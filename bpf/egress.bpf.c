/* Every packet of a sandbox's sockets, judged by the policy of this moment: a connection that an
 * update forbids sends nothing more. Raw sockets, kernel-made subflows and stale connects too.
 */
#include "packet.h"

SEC("cgroup_skb/egress")
int dsec_egress(struct __sk_buff *skb)
{
    return judge_skb(skb, REMOTE_IS_DESTINATION, AT_EGRESS);
}

/* What sockets receive: after an update the rest of a window would still come in, and datagrams
 * from a neighbour need no answer to carry data.
 */
#include "packet.h"

SEC("cgroup_skb/ingress")
int dsec_ingress(struct __sk_buff *skb)
{
    return judge_skb(skb, REMOTE_IS_SOURCE, AT_INGRESS);
}

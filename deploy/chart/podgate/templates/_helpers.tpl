{{- define "podgate.commonLabels" -}}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/part-of: podgate
app.kubernetes.io/managed-by: {{ .Release.Service | quote }}
{{- if eq .Release.Service "Helm" }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name (replace "+" "_" .Chart.Version) | quote }}
{{- end }}
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- /* Names are fixed: a cluster has one podgate, and `kubectl podgate` finds its objects by them. */}}
{{- define "podgate.labels" -}}
app.kubernetes.io/name: podgate
app.kubernetes.io/component: agent
{{ include "podgate.commonLabels" . }}
{{- end }}

{{- define "podgate.controllerLabels" -}}
app.kubernetes.io/name: podgate-controller
app.kubernetes.io/component: controller
{{ include "podgate.commonLabels" . }}
{{- end }}

{{- define "podgate.proxyLabels" -}}
app.kubernetes.io/name: podgate-proxy
app.kubernetes.io/component: proxy
{{ include "podgate.commonLabels" . }}
{{- end }}

{{- define "podgate.hubLabels" -}}
app.kubernetes.io/name: podgate-hub
app.kubernetes.io/component: hub
{{ include "podgate.commonLabels" . }}
{{- end }}

{{- define "podgate.image" -}}
{{- with .Values.image -}}
{{ .registry }}/{{ .repository }}:{{ default $.Chart.AppVersion .tag }}{{ if .digest }}@{{ .digest }}{{ end }}
{{- end }}
{{- end }}

{{- /* Variables of containers that use the API server: client-go's names for its address. */}}
{{- define "podgate.apiServer" -}}
- name: KUBERNETES_SERVICE_HOST
  value: {{ .Values.apiServer.host | quote }}
- name: KUBERNETES_SERVICE_PORT
  value: {{ .Values.apiServer.port | quote }}
{{- end }}

{{- /* The agents' user, as tokens of its account name it. */}}
{{- define "podgate.agentUser" -}}
system:serviceaccount:{{ .Release.Namespace }}:podgate
{{- end }}

{{- /* Whether the API server adds readiness gates by itself; empty if not. */}}
{{- define "podgate.injectsByPolicies" -}}
{{- if eq .Values.injection.mechanism "auto" }}
{{- if .Capabilities.APIVersions.Has "admissionregistration.k8s.io/v1/MutatingAdmissionPolicy" }}true{{ end }}
{{- else if eq .Values.injection.mechanism "policies" }}true{{ end }}
{{- end }}

{{- /* Whether the controller's webhook adds them; empty if not. */}}
{{- define "podgate.injectsByWebhook" -}}
{{- if or (eq .Values.injection.mechanism "auto") (eq .Values.injection.mechanism "webhook") }}
{{- if not (include "podgate.injectsByPolicies" .) }}true{{ end }}
{{- end }}
{{- end }}

{{- /* Whether webhooks call the controller; empty if not. */}}
{{- define "podgate.hasWebhooks" -}}
{{- if and .Values.controller.enabled (ne .Values.controller.webhook.certificate "none") }}true{{ end }}
{{- end }}

{{- /* Namespaces whose pods get a gate. word: the label's value, beside `everything` and, for those that
need nothing else, `all`. */}}
{{- define "podgate.injectNamespaces" -}}
matchExpressions:
  - key: podgate.io/inject
    operator: In
    values: [{{ .word }}, {{ if ne .word "policies" }}all, {{ end }}everything]
  - key: kubernetes.io/metadata.name
    operator: NotIn
    values: [{{ .root.Release.Namespace | quote }}]
{{- end }}

{{- /* Pods that get a gate, the same by a policy and by a webhook. gate: of podgate.io. */}}
{{- define "podgate.injectConditions" -}}
{{ include "podgate.injectablePods" .root }}
- name: not-yet
  expression: >-
    !has(object.spec.readinessGates) ||
    !object.spec.readinessGates.exists(g, g.conditionType == 'podgate.io/{{ .gate }}')
{{- end }}

{{- /* Pods that get readiness gates at all. */}}
{{- define "podgate.injectablePods" -}}
- name: not-host-network
  expression: "!has(object.spec.hostNetwork) || !object.spec.hostNetwork"
- name: not-mirror
  expression: >-
    !has(object.metadata.annotations) ||
    !('kubernetes.io/config.mirror' in object.metadata.annotations)
- name: not-windows
  expression: >-
    (!has(object.spec.os) || object.spec.os.name != 'windows') &&
    (!has(object.spec.nodeSelector) || !('kubernetes.io/os' in object.spec.nodeSelector) ||
    object.spec.nodeSelector['kubernetes.io/os'] != 'windows')
{{- end }}

{{- /* Of a webhook: which path of the controller it calls. caBundle is written by the Job or by cert-manager. */}}
{{- define "podgate.webhookClient" -}}
service:
  name: podgate-controller
  namespace: {{ .root.Release.Namespace }}
  path: {{ .path }}
  port: 9443
{{- if eq .root.Values.controller.webhook.certificate "secret" }}
caBundle: {{ .root.Values.controller.webhook.caBundle | quote }}
{{- end }}
{{- end }}

{{- /* Of a webhook configuration. */}}
{{- define "podgate.webhookAnnotations" -}}
{{- if eq .Values.controller.webhook.certificate "cert-manager" -}}
annotations:
  cert-manager.io/inject-ca-from: {{ .Release.Namespace }}/podgate-controller
{{- end }}
{{- end }}

{{- /* Objects that exist for the Job alone, which Helm removes when it has succeeded. */}}
{{- define "podgate.jobHook" -}}
{{- if eq .root.Release.Service "Helm" -}}
annotations:
  helm.sh/hook: post-install,post-upgrade
  helm.sh/hook-weight: {{ .weight | quote }}
  helm.sh/hook-delete-policy: before-hook-creation,hook-succeeded
{{- end }}
{{- end }}

{{- /* The controller's place, and the Job's: nodes of the control plane where there are any. */}}
{{- define "podgate.controllerPlace" -}}
nodeSelector:
  kubernetes.io/os: linux
  {{- with .Values.controller.nodeSelector }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- with .Values.controller.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
affinity:
  nodeAffinity:
    requiredDuringSchedulingIgnoredDuringExecution:
      nodeSelectorTerms:
        - matchExpressions:
            - key: kubernetes.io/arch
              operator: In
              values: {{ toJson .Values.agent.architectures }}
    # Root of a node reads the tokens of its pods.
    preferredDuringSchedulingIgnoredDuringExecution:
      - weight: 100
        preference:
          matchExpressions:
            - key: node-role.kubernetes.io/control-plane
              operator: Exists
{{- end }}

{{- /* Affinity of what has to run on each node: those of the image's architectures. */}}
{{- define "podgate.nodesWithKernel" -}}
nodeAffinity:
  requiredDuringSchedulingIgnoredDuringExecution:
    nodeSelectorTerms:
      - matchExpressions:
          - key: kubernetes.io/arch
            operator: In
            values: {{ toJson .Values.agent.architectures }}
          # Nodes without a kernel of their own, which no taint keeps this pod from.
          - key: type
            operator: NotIn
            values: [virtual-kubelet]
          - key: eks.amazonaws.com/compute-type
            operator: NotIn
            values: [fargate]
{{- end }}
